"""The WebSocket gateway: `python -m tinyvllm.gateway` serves one engine to programs and browsers.

protocol  events in and out, no I/O       web     plain HTTP: page, health, models; Origin
server    connections, lanes, pacing      static  the chat page and `client.js`
"""

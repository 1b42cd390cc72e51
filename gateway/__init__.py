"""The WebSocket gateway: `python -m tinyvllm.gateway` serves one engine to programs and browsers.

protocol    events in, no I/O                     server      one Gateway: sockets, HTTP, the end
events      events out: a response's log, no I/O  session     one connection: lanes, viewers
tools       function calls in text, no I/O        response    one generation, any number of viewers
auth, web   tokens, sites, HTTP replies, no I/O   connection  one socket: pace, watchdog
limits      every bound                           stats, metrics  what it does, live and counted
"""

"""`python -m tinyvllm.bench`: speed of this engine beside others, in one run, on the same prompts.

workloads.py    which prompts and lengths, drawn once for every engine
contenders/     tinyvllm, transformers and llama.cpp behind one small interface
measure.py      interleaved rounds: every engine in turn, then again; medians and paired ratios
ceilings.py     what the machine can do: read bandwidth, matrix FLOP/s, measured in the same run
op_table.py     each op's time, bytes, FLOPs and share of its ceiling
host_table.py   host time per token: everything that is not an op
report.py       JSON lines and the table
"""

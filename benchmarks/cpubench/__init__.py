"""What the benchmarks of CPU kernels share.

probes.py     calls of compiled kernels, and the machine's limits beside them
linears.py    KernelSpecs of linears, and the operands that they read
ours.py       turns of our linears over copies of a weight
peers.py      other projects' products, each in a process of its own (cpupeers/process.py)
quiet.py      whether other processes took the cores, and measuring again
growth.py     points that stand out from the trend of their neighbours
tables.py     a run as text and as Markdown
plots.py      plots as SVG
"""

"""What the benchmarks of CPU kernels share.

probes.py     the limits of the machine: bytes and operations per second; calls of compiled kernels
kernels.py    KernelSpecs of linears, and the operands that they read
quiet.py      whether other processes took the cores
growth.py     points that stand out from their neighbours
peers.py      other projects' products, each in a process of its own
peer.py       that process; peer_*.py have the products of one project each
tables.py     tables of a run, as text and as Markdown
plots.py      plots as SVG
"""

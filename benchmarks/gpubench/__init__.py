"""Shared modules of gpu_first.py, gpu_profile.py, gpu_predict.py and gpu_report.py.

document.py     the document of `gpu_first.py --json`     cells.py   what is measured, in which order
rig.py          one device: memory, capture, timing        ours.py    our kernels as work for a rig
weights.py      weights, their copies and references       layer.py   a decode step as a compiled program
peers.py        torch, tinygemm, bitsandbytes              probes.py  copy bandwidth, launch gaps
worker.py       runs cells in a process of its own         model.py   how long a cell should take, and why
sass.py         instructions of a kernel's loops           marks.py   compares measured with predicted
pages.py        the tables of docs/performance.md          profiled.py  kernels for ncu and the sanitizer
"""

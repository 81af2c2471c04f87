"""Random operator graphs: a generator, what they are held against, and what to do with one that fails.

graphs.py    a graph: typed values, statements, its text as a torch module
sizes.py     dims as polynomials of the symbols b, s and n
builder.py   typed insertion, forwards (a statement on values that exist) and backwards (a value of a wanted type)
rules_*.py   the vocabulary: one function for each kind of statement
shadow.py    eager torch, and its own sensitivity to rounding: which comparisons mean anything, and how close
batch.py     many graphs as one program: interpreter, passes, kernels, MLIR, files, the simulated GPU
shrink.py    the smallest graph that still fails; keep.py writes it as a test
"""

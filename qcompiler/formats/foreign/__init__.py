"""Other systems' packings: bijections between the arrays of their checkpoints and our packed tensors.

    packed, permutation = gptq.read(arrays, bits=4, group=128)
    arrays = gptq.write(packed, permutation=permutation)

One module per system; each has `read` and `write` for the arrays of one linear layer, under their names in the
checkpoint without the layer's path.  Codes are moved, never decoded.  Contradictory arrays (a shape, a zero point out
of range, a table of another data type) are an error that names the layer and the array.  NumPy only; other modules open
the files.
"""

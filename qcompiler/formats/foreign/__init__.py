"""Other systems' packings: bijections between the arrays of their checkpoints and our packed tensors.

    packed, permutation = gptq.read(arrays, bits=4, group=128)
    arrays = gptq.write(packed, permutation=permutation)

One module per system; each has `read` and `write` for the arrays of one linear layer, named as in the checkpoint behind
the layer's path.  Codes are moved, never decoded.  What contradicts itself (a shape, a zero point out of range, a table
of another data type) is an error that names the layer and the array.  NumPy only; files are opened elsewhere.
"""

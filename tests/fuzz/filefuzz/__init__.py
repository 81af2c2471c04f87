"""A structure-aware fuzzer for the files that qcompiler reads. docs/testing.md, "Fuzzing", says what it promises.

    seeds.py       sound inputs: a program file, GGUF files, checkpoint folders, IR text, arrays
    documents.py   what an edit changes: JSON, the zip of a program file, GGUF, safetensors, NumPy arrays, text
    mutate.py      a random list of edits for a seed
    targets.py     what is done with an input
    server.py      runs inputs in forked children with limits of time and memory
    campaign.py    runs targets in turn, counts, makes a finding small

An input is a seed's name and a list of edits, both JSON: a kept finding can be read, and is applied to today's seed.
"""

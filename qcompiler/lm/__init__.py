"""Language models: `qc.compile_causal_lm` and what it returns. A layer above `qcompile`, which it uses as anyone can.

    lm = qc.compile_causal_lm(model, quant="q4_K", max_seq_len=2048)
    lm.generate([1, 17, 4], max_new_tokens=64, temperature=0.7, seed=1)
    lm.save("model.qca");  lm = qc.load_causal_lm("model.qca")       # without torch and transformers

| module | holds |
|---|---|
| `step` | the module that is compiled: the model, its key-value cache as buffers, the mask by position (torch) |
| `compile` | `compile_causal_lm` (torch, transformers) |
| `record` | what a saved file says about its language model |
| `conversation` | sequences in a cache: which tokens it holds, and the calls that add to them |
| `sampling` | from logits to a token |
| `model` | `CausalLM`: `generate`, `conversation`, `save`; `load_causal_lm` |
| `text` | tokenizers and chat templates, in the extra `qcompiler[lm]` |
"""

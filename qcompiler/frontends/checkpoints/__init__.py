"""Files of weights: GGUF, safetensors, folders of transformers; reading and converting them."""

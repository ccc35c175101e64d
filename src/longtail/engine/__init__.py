"""How are tokens made? Model, KV lanes, batching, sampling, checkpoints in Hugging Face format."""

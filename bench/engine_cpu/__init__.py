"""The reference engine on a CPU, beside llama.cpp and vLLM's CPU engine, with the same weights."""

"""The reference engine on a CPU, compared with llama.cpp and vLLM's CPU engine, with the same weights."""

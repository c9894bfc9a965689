"""Models in GGUF files, as llama.cpp and Ollama have them. `file.GGUFModel` opens one."""

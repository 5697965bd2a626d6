"""Makes workers of scripts that other trainers run: Hugging Face's Trainer and Lightning."""

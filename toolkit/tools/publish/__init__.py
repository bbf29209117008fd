"""The model card, and the upload to the Hugging Face hub."""

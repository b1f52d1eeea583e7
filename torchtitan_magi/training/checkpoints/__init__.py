"""What is saved: digests, Hugging Face weights in and out, exports."""

"""Text to tokens and back: tokenizers, chat templates, streaming text, stop strings."""

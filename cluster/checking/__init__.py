"""The proof that a request's bytes do not depend on its company: cases, and what runs them."""

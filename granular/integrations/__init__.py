"""What other frameworks need of us: one module each, which only those import who use it."""

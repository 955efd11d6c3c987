"""Watch a data-parallel training job without changing it, and report its mistakes."""

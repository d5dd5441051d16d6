"""PyTorch: what an installed version cannot do (`limits`), and what it does not document (`private`)."""

"""What the demo, the tests and the benchmarks render with: tiny models, graphs, a ComfyUI server, a reference DiT.

Nothing in the product imports this package; importing it imports nothing heavy."""

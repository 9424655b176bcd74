"""A pack without nodes for custom_nodes of a test server: its template renders a tiny model with Monarch Sampler."""

NODE_CLASS_MAPPINGS = {}

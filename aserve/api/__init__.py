"""The OpenAI-compatible HTTP face of an engine: Starlette on Hypercorn's trio protocol code.

It speaks HTTP and JSON only; what a request may do and what comes back is the engine's.
"""

"""Measurements that compare aserve with others and write them down: `python -m bench.peers`."""

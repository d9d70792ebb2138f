"""Stand-ins that tests and simulations build deployments from, and the simulator itself.

Nothing in aserve imports this but `aserve sim`.
"""

"""Small legible stand-ins that tests build deployments from; nothing in aserve imports this."""

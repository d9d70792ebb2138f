"""Measurements that ship with aserve, for `aserve bench`; nothing else imports them."""

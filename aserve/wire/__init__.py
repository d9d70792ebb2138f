"""Bytes between processes: addresses, bounded frames, and who is allowed to speak. No meaning."""

"""Typed ways between planner and ranks, and between ranks. They carry; they decide nothing."""

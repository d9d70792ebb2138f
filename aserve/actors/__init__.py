"""Where things wait: the rank's loop, the leader's loop, and the engine that users hold."""

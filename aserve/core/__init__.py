"""aserve's theory of operation.

One brain, many hands. A `Planner` (pure, synchronous; no clock, randomness, torch or I/O) turns
events into a totally ordered log of `StepPlan`s; a rank is a pure function of that log plus its own
bytes. Facts only a rank knows (drawn tokens, step time) go up in a `StepReport` and come back, if
at all, inside a later plan. Nothing outside the planner decides.
"""

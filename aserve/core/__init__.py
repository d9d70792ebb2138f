"""aserve's theory of operation.

One brain, many hands. A `Planner` (pure, synchronous; no clock, randomness, torch or I/O) turns
events into a totally ordered log of `StepPlan`s; a rank is a pure function of that log plus its own
bytes. Facts only a rank knows (drawn tokens, step time) go up in a `StepReport` and come back, if
at all, inside a later plan. Nothing outside the planner decides.

    add, finish --> [ Planner ] == StepPlan --> [ Replica on each rank ] --> forward, sample
                        ^                                                        |
                        +----------------------- StepReport <--------------------+

Work. A `Sequence` is its known tokens and how many of them have KV; its work is the rest. So a
prompt, its chunks, what a cache hit leaves, a decode row and a resumption are the same subtraction;
prefill and decode differ only in their turn. A step (`compose`) takes decode rows first, then
chunks of started prompts, then new sequences, within a row budget; chunks but the last end on a
page border. Running sequences are so few that a page's worth of rows is left for the first chunk.

Waiting is cheap. A waiting sequence remembers how far the cache had it and looks only further, so
a queue head that is blocked for memory costs two lookups a step, however long its prompt.

Pages. `pages` is the ledger: a page is free, owned by one sequence, or the cache's. `radix` is the
cache: a node a page, locks up the path, eviction of the least recently used unlocked leaf. `group`
(one a DP group, with its own pool) moves pages between them: a sequence gets pages for all it knows
when it starts (so a prefill never stops half-way) and one more at each page border; prompt pages
enter the tree as their chunk is reported, the rest when it leaves. A sequence whose copy of a page
came second keeps its own until it leaves. A page has two lifetimes, its sequence's and its last
writer's: a sequence aborted with rows in flight holds its pages until that report.

Who runs. `admission` lets a sequence in if the pool can hold what it and the running ones are
expected to need; the expectation (`NewTokenRatio`) falls while decoding and rises when memory ran
out after all. Then somebody is retracted: dropped by the ranks, put first in its class of the
queue, and resumed later from all its known tokens. A sequence that needs pages which another is
just computing waits for them, and lets others pass; nobody else is ever passed over. A sequence
that runs alone fits the pool, since `add` refused what could not: hence no deadlock.

Microbatches. Up to `in_flight_max` plans are unanswered; a sequence belongs to one microbatch and
is in one unanswered plan at most. Its `Commit` comes in that microbatch's next plan; if it left,
its last commit and its drop come in the next plan of all, before its pages can be reused.

Agreement. Planner and `Replica` are two implementations of the same bookkeeping. Each folds what it
did in a step into a running digest; unequal digests are a `Desync`, naming rank and step. Results
are checked against the rows that were planned before anything moves.

Noise. `noise` says which integer stands behind a draw: a hash of (seed, position, token), nothing
else. So a seeded text does not depend on batch, chunk, cache, retraction or layout.

Rules. `config` is the tree of structs, `settings` reads it and finds everything wrong at once,
`features` says what goes together and why not, `layout` which rank is where.
"""

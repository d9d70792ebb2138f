"""aserve's theory of operation.

One brain, many hands. A `Planner` (pure, synchronous; no clock, randomness, torch or I/O) turns
events into a totally ordered log of `StepPlan`s; a rank is a pure function of that log plus its own
bytes. Facts only a rank knows (drawn tokens, step time) go up in a `StepReport` and come back, if
at all, inside a later plan. Nothing outside the planner decides.

    add, finish --> [ Planner ] == StepPlan --> [ Replica on each rank ] --> forward, sample
                        ^                                                        |
                        +----------------------- StepReport <--------------------+

Work. A `Sequence` is its known tokens and how many of them have been planned; its work is the rest.
So a prompt, its chunks, what a cache hit leaves, a decode row and a resumption are the same
subtraction; prefill and decode differ only in their turn. A step (`compose`) takes decode rows
first, then chunks of started prompts, then new sequences, within a row budget; chunks but the last
end on a page border. Running sequences are so few that a page's worth of rows is left for the
first chunk.

Order is enough. Ranks obey plans in order, so what a plan computes is there for the rows of every
later plan, reported or not. `kv_len` therefore counts rows planned, `computed_len` rows reported:
the next chunk of a prompt goes out while the last is in flight, and the chunks of one prompt fill
a pipeline; only what others may share, or may come to own, waits for reports.

Waiting is cheap. A waiting sequence remembers how far the cache had it and looks only further, so
a queue head that is blocked for memory costs two lookups a step, however long its prompt.

Pages. `pages` is the ledger: a page is free, owned by one sequence, or the cache's. `radix` is the
cache: a node a page, locks up the path, eviction of the least recently used unlocked leaf. `group`
(one a DP group, with its own pool) moves pages between them: a sequence gets pages for all it knows
when it starts (so a prefill never stops half-way) and one more at each page border; prompt pages
enter the tree as their chunk is reported, the rest when it leaves. A sequence whose copy of a page
came second keeps its own until it leaves. A page has two lifetimes, its sequence's and its last
writer's: a sequence that leaves with rows in flight holds its pages until the last rank has
reported the last of them.

A drafter may keep KV of its own in a sequence's pages that is made of pairs of tokens. Then a
page's key is its tokens and the one after them (`Speculation.bigrams`), so that who hits it goes on
as its writer did; a page whose next token nobody knows is not kept.

Who runs. `admission` lets a sequence in if the pool can hold what it and the running ones are
expected to need; the expectation (`NewTokenRatio`) falls while decoding and rises when memory ran
out after all. Then somebody of the group is retracted: dropped by the ranks, put first in its class
of the queue, and resumed later from all its known tokens. A victim with rows in flight is planned
no more and goes when they landed; its token is not lost. A sequence that needs pages which another
is just computing waits for them, and lets others pass; nobody else is ever passed over. A sequence
that runs alone fits the pool, since `add` refused what could not: hence no deadlock. Each
retraction is paid for with a token that somebody draws: hence no endless dance
(`Composer._make_room`).

Microbatches. Up to pp + overlap plans are unanswered (`depth`). A sequence that only prefills
belongs to its group, and goes with whichever step has rows for it; with its last chunk it joins a
microbatch, one with less than its even share. Its `Commit` comes in that microbatch's next plan,
where there is news: a chunk that draws nothing was what everybody expected. If it left, its last
commits and its drop come in the next plan of all, before its pages can be reused.

Lag. Values may lag, shapes may not. With one stage there is one microbatch, and up to `overlap`
plans of it lie behind the one being computed: all that Python does for a step hides behind a step.

    plan s       Rows(seq, start=7, tokens=(42,))            draws t
    plan s + 1   Rows(seq, start=8, tokens=(LAGGING,))       before the report of s: t is filled in
    plan s + 2   Commit(seq, (0,), (t,)), Rows(seq, start=9, tokens=(LAGGING,))

Position, slot, page and whether it draws are known, so all ranks and both ledgers count a lagging
row like any other; noise and rules go by position. The rank that draws for a group remembers its
last token of each sequence, moves penalties and grammar on by it, checks the commit that comes
later against it, and tells the other ranks of the stage in one gather that the plan announces.
`Commit`s come in order, `n_drawing` are on their way. A draw that must be the last (`max_tokens`)
has no row behind it. An end that nobody foresaw (a stop id or string, an abort, an error) has one
too many in flight: its sequence is FINISHED when it is reported, so its result goes nowhere, its
row counts as not computed and stays out of the cache, and its pages are held like those of any
rows in flight. A lagging row is a bonus: nobody is retracted for its page, or goes without one,
and who yields has none planned. With several stages nothing lags: the first would have to wait for
what the last one draws, while another microbatch fills that time with work.

Trees. `StepPlan.drafting` says how large a draft the rows of a step may end with (`speculation`
what a configuration allows). A result may bring one, the next tree below the token just drawn. It
is planned as rows with parents, in slots `kv_len` and after; its result is the accepted path, and
the commit of that path has every rank move the KV of its rows, row by row, to where they stand in
the text. Drafts only take what would be idle: they are cut to rows and pages that nobody needs for
a row that must be, and to the tokens that may still be drawn. Pages beyond the text stay for the
next tree, so that admission counts one tree a sequence. A step that drafts may itself lag, but
nothing is planned behind it, or behind a tree, before its report: the shape of those rows is not
known. With no drafts in a step, rows lag again.

How large. `draft_sizer` asks for the drafts that make the most tokens for the time, as far as
reports told: `pace` remembers what drafts of a size yield, and what steps take by their rows. Where
drafts do not pay none are asked for. A small part of the time goes to steps of other sizes, saved
up for and spent where little is expected to be lost, so that it learns when a text or a load
changes. It knows counts and reported microseconds only: another planner with the same reports
decides the same, and ranks read it off the plan.

Many ranks. Every rank reports every step, in order; a step is over when all have (`merge`), and
only then does what the leaders of its groups drew go out: a rank that was out of step may have had
a part in it. Planner and `Replica` are two implementations of the same bookkeeping. Each folds what
it did in a step into a running digest; unequal digests are a `Desync`, naming rank and step, as is
a report that cannot be. Results are checked against the rows that were planned before anything
moves.

New ranks. When ranks die, all are replaced, and `reset` takes the planner back to what clients
have been told: known tokens. All who ran wait again; the noise makes the rest of their text the
same, also of tokens that were drawn and lost on their way up.

Chunks. A chunk takes the longer the more precedes it, and stages wait for unequal ones. With
`dynamic_chunks` the first plans are a profile of the first stage; `chunk` fits its times once,
`sizer` gives each chunk, the first too, the length that keeps the pipe full, and learns from the
times of later reports what history costs. Where no fit is possible lengths are fixed, and
`statistics` says why.

Noise. `noise` says which integer stands behind a draw: a hash of (seed, position, token), nothing
else. So a seeded text does not depend on batch, chunk, cache, retraction or layout.

Rules. `config` is the tree of structs, `settings` reads it and finds everything wrong at once,
`features` says what goes together and why not, `layout` which rank is where.
"""

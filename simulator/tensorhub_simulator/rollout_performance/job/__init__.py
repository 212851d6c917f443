"""One job in virtual time, whatever system drives it: `job` has the leader, and what stands around it are the others.

`log` (entries as they are folded), `fleet` (machines that come and go), `trainer` (what submits and trains) and `drive`
(in what systems differ). `systems` imports it. It imports all below.

Seams: `job`, `log`.
"""

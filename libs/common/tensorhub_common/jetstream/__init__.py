"""What the hub keeps in JetStream: the log of a job, snapshots, blobs by digest, and leases on leadership.

Stands on `bus`; services and the SDK import it.
"""

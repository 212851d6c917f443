"""What the hub keeps in JetStream: the log of a job, snapshots, and blobs by digest.

Stands on `bus`; services and the SDK import it.
"""

"""Rings that lie on a device: the process that copies out of them, and the daemon's side of it.

    daemon (event loop, lanes)                                    one process per device
    processes.DeviceProcesses ──fork_server── start, kill ──▶     child
    device_ring.DeviceRing (a RingSource) ──one socket a ring──▶  ring_server → ring_copy.RingCopy → api.DeviceApi
                                                                                 cuda_api · sim_api

The daemon's own process loads no device library. Nothing is imported here: the fork server has to start small.
"""

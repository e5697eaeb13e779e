"""Files that another machine reads out of this one's memory, by NIXL (https://github.com/ai-dynamo/nixl).

    sender's machine                                     server's machine
    source.py: maps open files, registers them   <----   reader.py: reads them into files of its own

Over InfiniBand or RoCE the reader's network adapter fetches the bytes (RDMA), and the sender's CPU has no part in it; where there
is neither, NIXL uses TCP. Each end is a process of one transfer. So a library that crashes or hangs costs that transfer alone,
and to kill the process ends it at any moment.
"""

"""The process of a job made of a function: `python -m counterpoint.cluster.client` (`counterpoint/cluster/client/call.py`)."""

from counterpoint.cluster.client.call import main

main()

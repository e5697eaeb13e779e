"""The process of a job made of a function: `python -m cluster.client` (`cluster/client/call.py`)."""

from cluster.client.call import main

main()

"""An OpenAI-compatible endpoint for agents that only know a base URL, and agents as processes.

`server.py` serves; `session.py` is one rollout's share of it. `requests.py` and `messages.py` check what an agent sends,
`json_body.py` how large it is; `conversation.py` turns message histories into prompts without guessing tokens; `responses.py`
writes the answers. `agent.py` is the environment `agent`, whose processes are in `agent_process.py`;
`warm.py` has those that are forked.
`docs/gateway.md` explains the use.
"""

from counterpoint.environments.gateway.server import Gateway
from counterpoint.environments.gateway.session import Limits, Session

__all__ = ["Gateway", "Limits", "Session"]

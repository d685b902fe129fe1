"""The governed way of a call: contract, policy, approval, grant, dispatch, guard, facts, journal."""

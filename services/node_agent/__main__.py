"""`python -m services.node_agent`."""

from services.node_agent.app import run

if __name__ == "__main__":
    run()

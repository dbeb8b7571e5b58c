"""`python -m agentrl` is `agentrl`."""

from agentrl.cli import app

if __name__ == "__main__":
    app()

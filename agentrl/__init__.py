"""agentrl: train and run multi-agent LLM systems."""

__version__ = "0.1.0"

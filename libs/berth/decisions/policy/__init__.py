"""The policy document, whether it makes sense, and when its windows hold."""

from berth.decisions.policy.check import Problem, check, warnings
from berth.decisions.policy.document import ClassSettings, Policy, load_policy

__all__ = ["ClassSettings", "Policy", "Problem", "check", "load_policy", "warnings"]

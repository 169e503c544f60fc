"""Models with this attention and with another: training.py trains the small GPT of gpt.py, and step_costs.py times its
steps in the ways of ways.py; model_trial.py runs a model of transformers.
"""

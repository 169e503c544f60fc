"""Models with this attention and with another: training.py trains the small GPT of gpt.py; model_trial.py runs a model
of transformers.
"""

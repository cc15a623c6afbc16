from pixelis.agent import Agent as Agent
from pixelis.agent import Answer as Answer
from pixelis.jobs.functions import evaluate as evaluate
from pixelis.jobs.functions import rft as rft
from pixelis.jobs.functions import sft as sft

__version__: str

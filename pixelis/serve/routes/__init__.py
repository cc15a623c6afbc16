"""HTTP routes of the gateway, one APIRouter in a file."""

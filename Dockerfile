# Trains PPO on CartPole, or runs the tests:
#
#   docker build -t jaxvec . && docker run --rm -it jaxvec
#   docker run --rm -it jaxvec python -m pytest
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /jaxvec
COPY . .
RUN pip install --no-cache-dir -e ".[test]"
CMD ["python", "-m", "jaxvec.examples.ppo"]

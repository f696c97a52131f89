// The theme's search takes a minus before a word as "without it", and refuses two of them. So `--evaluate` found nothing.
const QUERY = 2
const postMessage = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...options) {
  if (message && message.type === QUERY) {
    message = {...message, data: message.data.replace(/(^|\s)-+/g, "$1")}
  }
  return postMessage.call(this, message, ...options)
}

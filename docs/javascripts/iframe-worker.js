// Browsers refuse web workers in pages that are opened from disk, and the theme's search runs in one. Here the worker's
// script runs in a hidden frame instead. The theme looks for the name IFrameWorker.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    frame.srcdoc = `<script src="${new URL(url, location).href}"></script>`;
    this.scope = new Promise((resolve) => (frame.onload = () => resolve(frame.contentWindow)));
    this.scope.then((scope) => {
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    });
    document.documentElement.append(frame);
  }

  async postMessage(data) {
    const scope = await this.scope;
    scope.dispatchEvent(new scope.MessageEvent("message", { data }));
  }
}
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = IFrameWorker;
}

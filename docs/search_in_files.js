// Browsers start no workers from files. Where the site is opened as files, the search runs in a hidden frame instead.
// The theme's `offline` plugin would ask another host for such a script.
window.IFrameWorker = class extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = frame.contentDocument.createElement("script");
    script.src = new URL(address, location.href);
    this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
    frame.contentDocument.head.append(script);
  }

  async postMessage(data) {
    await this.loaded;
    this.inside.dispatchEvent(new MessageEvent("message", { data }));
  }
};
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker;
}
